"""Fixtures of the storage tests; what they give is in `storage_servers`."""

from storage_servers import credentials, gateway, no_pauses, small_parts, stub, stub_storage

__all__ = ["credentials", "gateway", "no_pauses", "small_parts", "stub", "stub_storage"]
