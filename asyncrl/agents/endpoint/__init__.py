"""An OpenAI-compatible endpoint over an EnginePool."""
