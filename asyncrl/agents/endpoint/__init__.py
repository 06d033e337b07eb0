"""An OpenAI-compatible endpoint over an EnginePool, the record of sampled tokens, and the work queue."""
