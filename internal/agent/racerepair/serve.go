package racerepair

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// checkTimeout bounds the inspection of all pods for one request.
const checkTimeout = time.Minute

// Handler returns the status of all pods as JSON, the most serious state first.
func (c *Controller) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if now, _ := strconv.ParseBool(r.URL.Query().Get(agentapi.CheckParam)); now {
			c.checkAll(r.Context())
		}
		all := c.Pods()
		audit.Sort(all)
		text, err := json.MarshalIndent(all, "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(printable.Lines(text), '\n')) // the client may have closed the connection
	})
}

// checkAll inspects all pods now.
func (c *Controller) checkAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	var work sync.WaitGroup
	for _, k := range c.keys() {
		work.Go(func() { _, _ = c.Check(ctx, k) }) // a pod may be gone; the others have their own state
	}
	work.Wait()
}
