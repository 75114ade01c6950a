// Command ztunnel stands in for ztunnel on a node of the tests: "ztunnel SOCKET" serves the pods of the agent that listens there.
//
// It promises to forward HTTP/1.1 as ztunnel forwards TCP: each connection to its original destination by one connection, which begins
// in the pod's namespace with ztunnel's mark and, to the application, comes from the client's address. It adds itself with the pod's
// name to the header Via of each response; if the destination does not answer, the status is 502. It has no tunnels. SIGTERM ends it,
// with status 1 if the agent has broken the protocol. It prints the requests, and "stopped" with the name of a pod that it serves no longer.
//
// Start reading at main.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probe"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	var names sync.Map // of pods, by UID
	z := ztunneltest.New(os.Args[1], ztunneltest.Options{
		Bind: true, Reconnect: true,
		Answer: func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
			if r.Kind == zds.Add {
				names.Store(r.UID, r.Workload.Name)
			}
			fmt.Println(r, r.Workload.Name)
			before := z.Pods()
			z.Serve(r)
			after := z.Pods()
			for uid := range before {
				if _, served := after[uid]; !served {
					name, _ := names.Load(uid)
					fmt.Println("stopped", name)
				}
			}
		},
		Handle: func(uid string, port int, conn net.Conn) {
			name, _ := names.Load(uid)
			if err := serve(fmt.Sprint(name), port, conn.(*net.TCPConn)); err != nil {
				fmt.Println(name, err)
			}
		},
	})
	<-signals
	z.Close()
	if faults := z.Faults(); len(faults) > 0 {
		fmt.Println(faults)
		os.Exit(1)
	}
}

// serve forwards a connection until one side closes it.
func serve(name string, port int, conn *net.TCPConn) error {
	inbound := port == ztunneltest.PortPlaintext
	via := "ztunnel out " + name
	if inbound {
		via = "ztunnel in " + name
	}
	to, err := probe.OriginalDestination(conn)
	if err != nil {
		return err
	}
	fmt.Println(via, "from", conn.RemoteAddr(), "to", to)
	onward, dialing := dial(conn, to, inbound)
	if dialing == nil {
		defer onward.Close() //nolint:errcheck // nothing to lose
	}
	requests := bufio.NewReader(conn)
	if dialing != nil {
		if _, err = http.ReadRequest(requests); err == nil {
			_, err = fmt.Fprintf(conn, "HTTP/1.1 502 Bad Gateway\r\nVia: %s\r\nConnection: close\r\n\r\n%v\n", via, dialing)
		}
		return err
	}
	responses := bufio.NewReader(onward)
	for {
		request, ended := http.ReadRequest(requests)
		if ended != nil {
			return nil // the client is done
		}
		if last, err := forward(conn, onward, request, responses, via); err != nil || last {
			return err
		}
	}
}

// forward forwards one request and its response.
func forward(conn, onward net.Conn, request *http.Request, responses *bufio.Reader, via string) (last bool, err error) {
	if err = request.Write(onward); err != nil {
		return false, err
	}
	response, err := http.ReadResponse(responses, request)
	if err != nil {
		return false, err
	}
	if behind := response.Header.Get("Via"); behind != "" {
		via += ", " + behind
	}
	response.Header.Set("Via", via)
	return response.Close, errors.Join(response.Write(conn), response.Body.Close())
}

// mark is on ztunnel's packets.
const mark = 1337

// dial connects from within the namespace of conn, and to the application with the address of conn's client.
func dial(conn *net.TCPConn, to netip.AddrPort, inbound bool) (onward net.Conn, err error) {
	pod, err := namespace(conn)
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	dialer := net.Dialer{Timeout: 5 * time.Second}
	if inbound {
		client := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(client, 0))
	}
	dialer.Control = func(_, _ string, raw syscall.RawConn) error {
		var inner error
		err := raw.Control(func(fd uintptr) {
			inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark)
			if inbound {
				level, option := unix.SOL_IP, unix.IP_TRANSPARENT
				if to.Addr().Is6() {
					level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
				}
				inner = errors.Join(inner, unix.SetsockoptInt(int(fd), level, option, 1))
			}
		})
		return errors.Join(err, inner)
	}
	return netns.In(pod, func() (net.Conn, error) { return dialer.Dial("tcp", to.String()) })
}

// namespace opens the network namespace of a socket.
func namespace(conn *net.TCPConn) (pod *netns.Namespace, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	inner := raw.Control(func(fd uintptr) {
		var of int
		if of, err = unix.IoctlRetInt(int(fd), unix.SIOCGSKNS); err == nil {
			pod, err = netns.Open(fmt.Sprintf("/proc/self/fd/%d", of))
			err = errors.Join(err, unix.Close(of))
		}
	})
	return pod, errors.Join(inner, err)
}
