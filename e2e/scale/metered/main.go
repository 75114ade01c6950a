// Command metered stands in for a CNI plugin: it runs the program of its own name in /opt/cni/bin, and appends a line to
// /run/metered with the command, the CPU time of the plugin and of the programs that it started, and the duration, in microseconds.
//
// It promises the plugin's own input, output, environment and exit code. Start reading at main.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

func main() {
	plugin := exec.Command(filepath.Join("/opt/cni/bin", filepath.Base(os.Args[0]))) //nolint:noctx // the runtime ends it
	plugin.Stdin, plugin.Stdout, plugin.Stderr = os.Stdin, os.Stdout, os.Stderr
	began := time.Now()
	err := plugin.Run()
	if plugin.ProcessState == nil {
		fmt.Fprintln(os.Stderr, "metered:", err)
		os.Exit(1)
	}
	cpu, took := plugin.ProcessState.UserTime()+plugin.ProcessState.SystemTime(), time.Since(began)
	line := fmt.Sprintf("%s %d %d\n", os.Getenv("CNI_COMMAND"), cpu.Microseconds(), took.Microseconds())
	if failed := record(line); failed != nil || err != nil {
		fmt.Fprintln(os.Stderr, "metered:", errors.Join(err, failed))
	}
	os.Exit(plugin.ProcessState.ExitCode())
}

// record appends a line in one write, because several plugins run at once.
func record(line string) error {
	file, err := os.OpenFile("/run/metered", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteString(line)
	return errors.Join(err, file.Close())
}
