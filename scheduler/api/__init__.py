"""What clients speak: the HTTP API and the dashboard behind it."""
