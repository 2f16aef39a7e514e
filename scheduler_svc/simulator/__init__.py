"""The pure core under a virtual clock: compares scheduling settings on a trace, without a model or a device."""
