"""The parts of methods: tokens, parameters, declared metrics, the Method class."""
