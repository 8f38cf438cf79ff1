"""Small MoE models, recorded routing, and the truth about both."""
