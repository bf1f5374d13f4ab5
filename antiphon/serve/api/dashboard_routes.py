"""`/dashboard`: a page that draws what `/dashboard/data` says, once a second.

The page is open without an API key, for it holds no data. The data say what the server does, so they need the key like
a completion; the page asks for it. Page and script are one document: nothing else is loaded from anywhere.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from antiphon.serve.api.context import context_of
from antiphon.serve.api.dashboard_reading import DashboardReading
from antiphon.serve.api.descriptions import described_errors

router = APIRouter(tags=["status"])

_SCRIPTS = ("dashboard.js", "dashboard_draw.js")


@cache
def dashboard_page() -> tuple[str, str]:
    """(HTML, its content security policy): this script and no other, data from this server and from nowhere else."""
    folder = files("antiphon.serve.api")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in reversed(_SCRIPTS))
    page = folder.joinpath("dashboard.html").read_text(encoding="utf-8").replace("/* script */", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


@router.get("/dashboard", summary="A page that shows what the server does", response_class=HTMLResponse)
async def dashboard() -> Response:
    page, policy = dashboard_page()
    return HTMLResponse(page, headers={"content-security-policy": policy, "cache-control": "no-store"})


@router.get(
    "/dashboard/data",
    summary="What the dashboard shows, as JSON",
    response_model=DashboardReading,
    responses=described_errors(401),
)
async def dashboard_data(request: Request) -> Response:
    reading = await context_of(request).dashboard.reading()
    return Response(reading, media_type="application/json", headers={"cache-control": "no-store"})
