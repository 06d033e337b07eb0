"""From prompts to finished groups: generators, retries, seeds, evaluation, recordings."""
