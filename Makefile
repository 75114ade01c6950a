# istio-cni. "make" alone lists the targets; the bodies are in hack/.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Variables of the command line are text, which make does not expand, and go to the scripts by the environment.
$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(eval override export $(name) := $$(value $(name)))))

# How long each fuzz target runs.
FUZZTIME ?= 10s
export FUZZTIME

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Run the plugin in a real CNI chain, show where packets go, and why (root; installs packages)
	@hack/setup.sh
	@hack/build.sh
	@hack/demo.sh

.PHONY: test
test: ## Run the tests of the code, in network namespaces, and of the scripts, with the race detector (root; installs packages); PKG= and RUN= narrow it
	@hack/test.sh

.PHONY: unit
unit: ## Run the tests that need no root, cached: a minute at most after the first time; RUN= narrows it
	@hack/unit.sh

.PHONY: check
check: unit lint verify ## Run what a change needs before it is sent: unit, lint, verify

.PHONY: bare
bare: ## Run the README's demo and test on a temporary minimal Debian 12 (root)
	@hack/bare.sh

.PHONY: setup
setup: ## Install the packages for tests and demo on Debian (root)
	@hack/setup.sh test

.PHONY: build
build: ## Build bin/istio-cni: static, stripped, version from the checkout
	@hack/build.sh

.PHONY: kubectl-plugin
kubectl-plugin: ## Build "kubectl istio-cni" for six platforms, archives and krew manifest, into bin/kubectl-plugin
	@hack/kubectl-plugin.sh

.PHONY: image
image: ## Pack bin/image/istio-cni.tar, an OCI image for amd64 and arm64, without a container engine
	@hack/image.sh

.PHONY: release
release: ## Write dist/, everything that a release consists of: VERSION=v0.2.0, HUB=registry/path
	@hack/release.sh $$FLAGS "$$VERSION"

.PHONY: manifests
manifests: ## Write manifests/istio-cni.yaml, the chart's default rendering
	@hack/manifests.sh

.PHONY: chart-test
chart-test: ## Render the chart with every option, validate it by the API types and by the program (root)
	@hack/setup.sh
	@hack/manifests.sh --test

.PHONY: e2e
e2e: ## Build a real Kubernetes and run the tests against it (root); PKG= and RUN= narrow it
	@hack/e2e.sh

.PHONY: e2e-all
e2e-all: ## Run the tests that "make e2e" runs, and those that take long (root)
	@hack/e2e.sh --all

.PHONY: e2e-oldest
e2e-oldest: ## Run the tests of nodes and pods on the oldest Kubernetes that the chart supports (root); PKG= and RUN= narrow it
	@hack/e2e.sh --oldest

.PHONY: arch-test
arch-test: ## Run the tests of the encoders on ppc64le and s390x, under qemu (root if qemu-user-static is missing)
	@hack/arch.sh

.PHONY: lint
lint: ## Run golangci-lint, shellcheck and actionlint
	@hack/lint.sh

.PHONY: fmt
fmt: ## Format the Go code
	@hack/fmt.sh

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (10s) each
	@hack/fuzz.sh

.PHONY: bench
bench: ## Run the benchmarks and print which targets are met; BASE=<revision> compares two revisions
	@hack/bench.sh

.PHONY: vuln
vuln: ## Check for known vulnerabilities in source and binary
	@hack/vuln.sh

.PHONY: verify
verify: ## Check that go.mod, formatting and docs/deps.txt are in step
	@hack/verify.sh

.PHONY: cover
cover: ## Measure coverage of the whole test run, including processes (root)
	@hack/cover.sh

.PHONY: deps
deps: ## Rewrite docs/deps.txt, the packages linked into the binary
	@hack/deps.sh

.PHONY: clean
clean: ## Remove build results
	@rm -rf bin dist coverage.out coverage.html
