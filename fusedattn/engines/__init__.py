"""The engines: who computes a problem that has been checked."""
