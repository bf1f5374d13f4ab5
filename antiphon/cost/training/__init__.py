"""What a training step of a Mixture-of-Experts model costs: volumes, memory, time (MegaScale-MoE, Lina)."""
