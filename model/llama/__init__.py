"""The Llama family: grouped-query attention, RoPE in halves, SwiGLU, RMSNorm; Llama 2 and 3, Mistral, SmolLM."""
