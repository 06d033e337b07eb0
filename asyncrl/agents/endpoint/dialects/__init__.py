"""Dialects of the endpoint: request formats of OpenAI and Anthropic, and their answers."""
