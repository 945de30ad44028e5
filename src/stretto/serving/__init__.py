"""Generation for requests from outside: one stream each, decoded together; an OpenAI server."""
