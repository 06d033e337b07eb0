"""OpenAI's and Anthropic's request formats."""
