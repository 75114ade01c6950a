package runtimeconf

import "cmp"

// Files of CRI-O, crio.conf(5) and crio.conf.d(5).
const (
	crioFile    = "/etc/crio/crio.conf"
	crioDropIns = "/etc/crio/crio.conf.d/*"
)

// crioConf is the section of a file of CRI-O. plugin_dir is a deprecated key, searched after plugin_dirs.
type crioConf struct {
	CRIO struct {
		Network struct {
			NetworkDir string   `toml:"network_dir"`
			PluginDir  string   `toml:"plugin_dir"`
			PluginDirs []string `toml:"plugin_dirs"`
		} `toml:"network"`
	} `toml:"crio"`
}

// crio reads the main file and the drop-in files in the order of their names; each key of a later one replaces an earlier one's.
func (r *reader) crio() {
	files := r.glob(crioDropIns)
	if r.exists(crioFile) {
		files = append([]string{crioFile}, files...)
	}
	extra := ""
	for _, file := range files {
		var f crioConf
		if !r.decode(file, &f) {
			continue
		}
		r.Source = cmp.Or(r.Source, file)
		network := f.CRIO.Network
		r.ConfDir, extra = cmp.Or(network.NetworkDir, r.ConfDir), cmp.Or(network.PluginDir, extra)
		if len(network.PluginDirs) > 0 {
			r.BinDirs = network.PluginDirs
		}
	}
	if extra != "" {
		r.BinDirs = append(r.BinDirs, extra)
	}
}
