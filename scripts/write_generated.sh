#!/usr/bin/env bash
# Write the files that follow from the code: the schema, the reference, troubleshooting and the picture of the packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python -m glm46 schema >train_configs/schema.json.new
mv train_configs/schema.json.new train_configs/schema.json
python scripts/write_reference.py
python scripts/write_troubleshooting.py
python scripts/draw_packages.py
