"""The link that moves cache state between a prefill node and a decode node."""
