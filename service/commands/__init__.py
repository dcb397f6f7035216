"""The subcommands of `plait`, one module each. They import what is heavy only when they run."""
