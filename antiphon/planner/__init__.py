"""Which layout, how many of which device, which degrees: searches over the cost model. Imports no torch."""
