# The image by a container engine, for those who have one: the same files as hack/image.sh packs without.
#
#   docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/install-cni:TAG .
#
# It cross-compiles: the builder always runs on the machine's own architecture.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETARCH
# The tag leaves out what would cost each start of the program 3 ms, see hack/lib.sh. The version is that of the
# checkout, which is why .git is part of the context.
RUN CGO_ENABLED=0 GOOS=linux GOARCH=$TARGETARCH go build -trimpath -tags urfave_cli_no_docs -ldflags '-s -w' \
      -o /rootfs/opt/cni/bin/istio-cni .
# The names of the roles, where images of Istio have had them.
RUN set -e; for link in \
      opt/cni/bin/istio-cni-repair opt/cni/bin/istio-cni-taint opt/cni/bin/istio-iptables \
      opt/local/bin/istio-cni-taint \
      usr/local/bin/install-cni usr/local/bin/istio-cni usr/local/bin/istio-cni-repair \
      usr/local/bin/istio-cni-taint usr/local/bin/istio-iptables; do \
      mkdir -p "/rootfs/$(dirname "$link")"; \
      ln -s /opt/cni/bin/istio-cni "/rootfs/$link"; \
    done

FROM scratch
LABEL org.opencontainers.image.title="istio-cni" \
      org.opencontainers.image.description="Redirects the traffic of Istio sidecar pods: CNI plugin, node agent and taint controller." \
      org.opencontainers.image.source="https://github.com/meshcni/istio-cni" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /rootfs/ /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cni/bin
WORKDIR /opt/cni/bin
# The node's directories are root's. The taint controller gets another user from its manifest.
USER 0:0
CMD ["install-cni"]
