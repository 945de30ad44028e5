"""Generation for external requests, decoded together, and an OpenAI-compatible server."""
