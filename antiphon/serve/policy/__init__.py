"""Who runs when, on plain integers: admission, paging, batching, micro-batches, routing, stopping. No torch.

The engine and the simulator run this very code; only what a step *costs* differs between them.
"""
