"""Pages: each reads what it shows from the API and returns plain components."""
