"""SGLang's own scheduler with a fake model, each row compared."""
