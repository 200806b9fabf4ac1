"""YAML runs: what a file may say (`config`), its tensors (`inputs`), `verify` and `bench`, its `report`."""
