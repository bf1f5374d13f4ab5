"""The OpenAI-compatible HTTP server: validates, tokenizes, streams. It never touches the model.

Reading order: `server` (what is where), `requests` (the shapes; those of answers are in `openapi_answers`),
`parameters` and `prompts` (a request becomes engine requests), `generation` (engine outputs become text), `respond`
(text becomes JSON or server-sent events). `guard` is what a request passes before: connections, strict HTTP, limits on
bodies. Skip it at first.
"""
