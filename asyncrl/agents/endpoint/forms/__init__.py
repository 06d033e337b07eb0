"""Forms: each endpoint's own way to ask and to answer. All of them are translated into one chat call, or one text."""
