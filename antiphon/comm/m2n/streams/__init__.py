"""Sends and receives in the order of a stream, for tensors on a GPU. Nothing of the engine imports this package yet."""
