"""Everything MLX: load a model, prefill in chunks, decode in a continuous batch, and the solo oracle."""
