"""Benchmarks of the queue, the event stream and the pipeline."""
