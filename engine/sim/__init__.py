"""The real scheduler on a simulated clock and device: what a policy would do with a trace, in seconds."""
