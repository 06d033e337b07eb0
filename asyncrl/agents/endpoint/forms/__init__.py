"""Forms: each endpoint's own way to ask and to answer. Each call becomes one chat, or one text."""
