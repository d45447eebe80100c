"""The adapters, one file for each seam between speculators and vLLM."""
