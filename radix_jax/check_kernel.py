"""A kernel of one's own through the oracle grid."""
