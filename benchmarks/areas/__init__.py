"""Areas of the table, one module each, and the processes of their own that they need."""
