"""What work costs on a machine: seconds and bytes from a model, a device, a network and a batch. Imports no torch."""
