"""Keep traces within their leases and limits: expiry, eviction, room, quotas."""
