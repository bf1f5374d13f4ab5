"""The papers' figures and tables, theirs beside ours: claims as data, each with the function that computes our
value."""
