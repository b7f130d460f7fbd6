"""The datastore on disk: a manifest, and key and value shards as ordinary ``.npy`` files."""

from .manifest import Manifest, Shard, plan_shards, value_dtype_for
from .reader import Datastore
from .writing import DatastoreWriter, ShardWriter

__all__ = ["Datastore", "DatastoreWriter", "Manifest", "Shard", "ShardWriter", "plan_shards", "value_dtype_for"]
