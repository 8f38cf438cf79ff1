"""Share errors, identifiers, security and model facts among all sides."""
