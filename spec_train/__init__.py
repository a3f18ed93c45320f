"""spec-train: train speculative-decoding heads, measure what they accept, and serve them with vLLM."""

__version__ = "0.1.0"
