"""Engine adapters, one package an engine; `capturer` copies routing off a device."""
