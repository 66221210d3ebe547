"""Recorded workloads run against the scheduling rule."""
