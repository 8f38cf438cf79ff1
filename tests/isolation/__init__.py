"""Access control and the isolation of tenants, broken on purpose."""
