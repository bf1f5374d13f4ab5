"""The colours of all drawings: Okabe and Ito's, kept apart by colour-blind readers, on white and on dark grey."""

from antiphon.specs.plan import Layout

LAYOUT_COLOURS: dict[Layout, str] = {
    "disaggregated": "#0088cc",
    "hybrid": "#e69f00",
    "tp_pp": "#009e73",
    "dp_ep": "#cc79a7",
}
PART_COLOURS = {
    "compute": "#0088cc",
    "memory bandwidth": "#e69f00",
    "scale-up network": "#009e73",
    "scale-out network": "#d55e00",
    "fixed cost": "#999999",
}
FREE = "rgba(150,150,150,0.25)"
MEMORY_COLOURS = {"weights": "#0088cc", "KV cache": "#e69f00", "reserve": "#999999", "free": FREE}
BATCH_COLOURS = ("#0088cc", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a800", "#999999")
ROLE_COLOURS = {"attention": "#0088cc", "experts": "#e69f00", "both": "#009e73"}
MARK = "#d62728"
# From even use to a collapsed router: a value between two of them takes the nearer one's colour.
HEAT_COLOURS = ("#2c7bb6", "#6baed6", "#abd9e9", "#d5ecd4", "#ffffbf", "#fed98e", "#fdae61", "#ea633e", "#d7191c")
