"""For people: a gateway or an engine without a run, so that an agent can be tried, and recorded, before anything is trained."""
