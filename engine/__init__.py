"""Everything MLX: models, chunked prefill, continuous-batch decode, the solo oracle."""
