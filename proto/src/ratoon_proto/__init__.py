"""The wire contract of Ratoon: `ratoon_proto.v1` (generated) and `ratoon_proto.codec`."""
