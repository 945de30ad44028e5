"""vLLM as a generation engine, driven chunk by chunk."""
