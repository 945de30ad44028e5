"""vLLM as a generation engine that decodes in chunks."""
